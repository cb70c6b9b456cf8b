"""Makes the golden values beside this file with transformers; see README.md.

python tests/golden/hf/make.py, where transformers and torch are installed.
"""

import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
SQUARE = {
  'vocab_size': 96,
  'd_model': 16,
  'd_kv': 8,
  'd_ff': 32,
  'num_layers': 3,
  'num_decoder_layers': 2,
  'num_heads': 8,
  'relative_attention_num_buckets': 8,
  'relative_attention_max_distance': 20,
  'feed_forward_proj': 'gated-gelu',
  'tie_word_embeddings': False,
  'decoder_start_token_id': 0,
  'dropout_rate': 0.0,
}


def main() -> None:
  import torch
  import transformers

  def logits(model, golden):
    inputs, decoder_inputs = (
      torch.tensor(golden[key]).long() for key in ('input_ids', 'decoder_input_ids')
    )
    mask = (inputs > 0).long()
    with torch.no_grad():
      output = model(
        input_ids=inputs, attention_mask=mask, decoder_input_ids=decoder_inputs
      )
    return output.logits.numpy()

  torch.manual_seed(7)
  random = np.random.default_rng(7)
  folder = HERE / 'square'
  config = transformers.T5Config(**SQUARE)
  model = transformers.T5ForConditionalGeneration(config).eval()
  # transformers 5 ties the head in any case; T5 1.1 has one of its own.
  model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 16))
  for name, values in model.named_parameters():
    if 'relative_attention_bias' in name:
      values.data = torch.randn(values.shape)
  model.save_pretrained(folder)
  golden = {
    'input_ids': random.integers(2, 96, (3, 24), dtype=np.int32),
    'decoder_input_ids': random.integers(2, 96, (3, 40), dtype=np.int32),
  }
  golden['input_ids'][1, 11:] = golden['input_ids'][2, 3:] = 0
  golden['decoder_input_ids'][:, 0] = 0
  np.savez_compressed(folder / 'golden.npz', **golden, logits=logits(model, golden))

  # What the float32 logits of the others are worth: theirs amplify rounding.
  for folder in (HERE / 'v1_0', HERE / 'v1_1', HERE / 'square'):
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    golden = dict(np.load(folder / 'golden.npz'))
    exact = logits(model.double().eval(), golden).astype(np.float32)
    np.savez_compressed(folder / 'float64.npz', logits=exact)


if __name__ == '__main__':
  main()

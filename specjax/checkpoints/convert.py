"""Converts a T5's checkpoint: T5X, Hugging Face and specjax's own, all ways.

  python -m specjax.checkpoints.convert t5-small t5-small.safetensors

One parameter at a time is in memory. What is written goes into a hidden folder
beside the destination, is read back and compared, and then renamed: an interrupted
conversion leaves no half of a checkpoint, and the same command continues it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import rich.console
import rich.progress

from specjax.checkpoints import files, formats, hf, store, t5x, tensors
from specjax.checkpoints.leaves import Index, Leaf, Weights, check_finite, read_whole

FORMATS = ('t5x', 'hf', 'specjax')
DTYPES = ('same', 'float32', 'bfloat16')
USAGE_ERROR = 2
INTERRUPTED = 130
_PLAN = 'conversion.json'

Advance = Callable[[int], None]


def convert(
  source: str | os.PathLike,
  destination: str | os.PathLike,
  *,
  to: str | None = None,
  dtype: str = 'same',
  overwrite: bool = False,
  console: rich.console.Console | None = None,
) -> str:
  """Converts a checkpoint and compares what was written with what was read.

  Args:
    source: any checkpoint that `formats.open_weights` opens.
    destination: a file for 'specjax', a folder for the others; local.
    to: 't5x', 'hf' or 'specjax'; None: by the destination's name, `*.safetensors`
      and `checkpoint_N` (T5X).
    dtype: 'float32', 'bfloat16', or 'same': what the source has (float16, in which
      no T5 may run, becomes float32).
    overwrite: replace what is at the destination.
    console: shows progress; None: nothing is shown.

  Returns:
    SHA-256 of the names and values that were read back.

  Raises:
    ValueError: bad input, a damaged source or a disk that fails; the message names
      the parameter, and nothing is at the destination that was not there before.
  """
  place, to = _destination(destination, to)
  if place.exists() and not overwrite:
    raise ValueError(f'{place} exists; name another destination or pass --overwrite')
  if dtype not in DTYPES:
    raise ValueError(f'dtype: {dtype!r} is unknown; choose from {", ".join(DTYPES)}')
  weights = _as_dtype(formats.open_weights(source), dtype)
  if to == 't5x':
    weights = untie_unscaled(weights)
  folder = place.parent / f'.{place.name}.partial'
  _prepare(folder, {'source': files.resolve(source), 'to': to, 'dtype': dtype})
  unfinished = folder / place.name
  size = sum(leaf.nbytes for leaf in weights.leaves.values())
  try:
    with _progress(console, size) as task:
      if not _opens(unfinished):
        _write(unfinished, _counted(weights, task('writing')), to)
      found = _verify(unfinished, weights, task('verifying'))
    _move(unfinished, place, folder)
  except ValueError:
    shutil.rmtree(folder)
    raise
  shutil.rmtree(folder)
  return found


def _destination(given: str | os.PathLike, to: str | None) -> tuple[Path, str]:
  """Where to write, in which format."""
  if os.fspath(given).startswith(files.BUCKET):
    raise ValueError(
      f'{given}: a conversion writes to a disk; convert into a folder, then copy it '
      'with gcloud storage cp -r'
    )
  place = Path(files.resolve(Path(given).expanduser().parent)) / Path(given).name
  if not place.parent.is_dir():
    raise ValueError(f'{place.parent} is no folder; make it, or name another')
  is_file = place.suffix == formats.SPECJAX_SUFFIX
  if to is None and is_file:
    to = 'specjax'
  elif to is None and formats.STEP.fullmatch(place.name):
    to = 't5x'
  if to not in FORMATS:
    raise ValueError(
      f'to: {to or "not given"}; pass --to with one of {", ".join(FORMATS)}, or name '
      f'the destination *{formats.SPECJAX_SUFFIX} (specjax) or checkpoint_N (T5X)'
    )
  if (to == 'specjax') != is_file:
    raise ValueError(
      f'{place}: specjax writes a file *{formats.SPECJAX_SUFFIX}, the other formats a '
      'folder; name the destination accordingly'
    )
  return place, to


def _as_dtype(weights: Weights, dtype: str) -> Weights:
  def chosen(leaf: Leaf) -> np.dtype:
    if dtype != 'same':
      return np.dtype(dtype)
    return np.dtype(np.float32) if leaf.dtype == np.float16 else leaf.dtype

  return weights._replace(
    leaves={
      name: tensors.cast(leaf, chosen(leaf)) for name, leaf in weights.leaves.items()
    }
  )


def untie_unscaled(weights: Weights) -> Weights:
  """T5X scales a tied head always: one that is not scaled becomes a head of its own."""
  config = weights.config
  if not config.logits_via_embedding or config.scale_tied_logits:
    return weights
  config = dataclasses.replace(
    config, logits_via_embedding=False, scale_tied_logits=True
  )
  head = tensors.transpose(weights.leaves['token_embedder/embedding'])
  leaves = {**weights.leaves, 'decoder/logits_dense/kernel': head}
  return Weights(config, leaves, weights.notes)


def _prepare(folder: Path, plan: dict[str, str]) -> None:
  """The hidden folder, empty, or as an interrupted conversion of that plan left it."""
  path = folder / _PLAN
  try:
    if path.exists() and json.loads(path.read_text(encoding='utf-8')) == plan:
      return
    if folder.exists():
      shutil.rmtree(folder)
    folder.mkdir()
    path.write_text(json.dumps(plan), encoding='utf-8')
  except OSError as error:
    raise ValueError(
      f'cannot write {folder} ({error.strerror}); choose another'
    ) from error


def _opens(path: Path) -> bool:
  """Whether all has been written, and only the comparison is left."""
  try:
    formats.open_weights(path)
  except ValueError:
    return False
  return True


def _write(path: Path, weights: Weights, to: str) -> None:
  if to == 'hf':
    hf.write(path, weights)
  elif to == 'specjax':
    store.write(path, weights)
  else:
    step = formats.STEP.fullmatch(path.name)
    t5x.write(path, weights, step=int(step[1]) if step else 0, continues=True)


def _verify(path: Path, weights: Weights, advance: Advance) -> str:
  """Reads everything back as any user would; returns the hash of it."""
  written = formats.open_weights(path)
  ours = weights.config.to_dict()
  for field, value in written.config.to_dict().items():
    if value != ours[field]:
      raise ValueError(
        f'{field} is {ours[field]}, and would be read back as {value}: that format '
        'does not keep it; choose another with --to'
      )
  if {*written.leaves} != {*weights.leaves}:
    names = ', '.join(sorted({*written.leaves} ^ {*weights.leaves}))
    raise ValueError(f'{path.name}: {names} were lost or added; this is a fault')

  def compared() -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(weights.leaves):
      values, expected = (
        np.ascontiguousarray(read_whole(each.leaves[name]))
        for each in (written, weights)
      )
      if (
        values.dtype != expected.dtype
        or values.shape != expected.shape
        or not np.array_equal(values.view(np.uint8), expected.view(np.uint8))
      ):
        raise ValueError(
          f'{name} is not what was written when it is read back; check the disk and '
          'convert again'
        )
      advance(values.nbytes)
      yield name, values

  return store.digest(compared())


def _move(unfinished: Path, place: Path, folder: Path) -> None:
  """Puts what is finished at its place; what was there goes with the hidden folder."""
  try:
    if place.exists():
      os.replace(place, folder / 'replaced')
    os.replace(unfinished, place)
  except OSError as error:
    raise ValueError(f'cannot write {place} ({error.strerror})') from error


def _counted(weights: Weights, advance: Advance) -> Weights:
  """The weights, telling how many bytes were read; not finite ones are refused."""

  def counted(name: str, leaf: Leaf) -> Leaf:
    def read(index: Index) -> np.ndarray:
      values = leaf.read(index)
      check_finite(name, values)
      advance(values.nbytes)
      return values

    return leaf._replace(read=read)

  leaves = {name: counted(name, leaf) for name, leaf in weights.leaves.items()}
  return weights._replace(leaves=leaves)


@contextlib.contextmanager
def _progress(
  console: rich.console.Console | None, size: int
) -> Iterator[Callable[[str], Advance]]:
  if console is None:
    yield lambda name: lambda count: None
    return
  columns = (
    *rich.progress.Progress.get_default_columns(),
    rich.progress.DownloadColumn(),
  )
  with rich.progress.Progress(*columns, console=console) as bar:

    def task(name: str) -> Advance:
      number = bar.add_task(name, total=size)
      return lambda count: bar.advance(number, count)

    yield task


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ValueError(f'{message}; see {self.prog} --help')


def main(argv: Sequence[str] | None = None) -> int:
  """Converts; returns the exit code."""
  parser = _Parser(
    prog='python -m specjax.checkpoints.convert',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    'source',
    metavar='SRC',
    help='a checkpoint of a T5, local or gs://: ' + formats.LOOKED_FOR,
  )
  parser.add_argument(
    'destination',
    metavar='DST',
    help='a folder that does not exist, or a new *.safetensors file (specjax)',
  )
  parser.add_argument(
    '--to',
    choices=FORMATS,
    help="format of DST; may be left out if DST's name says it: *.safetensors is "
    'specjax, checkpoint_N is t5x',
  )
  parser.add_argument(
    '--dtype',
    choices=DTYPES,
    default='same',
    help='of the parameters in DST; default: as in SRC (float16 becomes float32)',
  )
  parser.add_argument(
    '--overwrite', action='store_true', help='replace DST if it is there'
  )
  try:
    options = parser.parse_args(argv)
    found = convert(
      options.source,
      options.destination,
      to=options.to,
      dtype=options.dtype,
      overwrite=options.overwrite,
      console=rich.console.Console(stderr=True),
    )
  except ValueError as error:
    print('specjax:', ' '.join(str(error).split()), file=sys.stderr)
    return USAGE_ERROR
  except KeyboardInterrupt:
    print('interrupted; the same command continues', file=sys.stderr)
    return INTERRUPTED
  print(
    f'{options.destination}: written and compared, without a vocabulary (copy it '
    f'beside, or name it with --vocabulary); sha256 of all parameters {found}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(main())

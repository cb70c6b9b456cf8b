"""The letter legend: every array in specjax carries its shape in its name.

Inside functions a suffix names the axes (`logp_BG1V`); at public seams the
aliases below do, and are checked by beartype under pytest.

  B  rows of the batch            E  encoder (source) positions
  T  tokens in one call           V  vocabulary ids
  G  drafted tokens (gamma)       D  model width
  G1 G + 1                        H  heads        K  head width
  S  slots of a decode buffer     F  mlp width    R  relative-position buckets
  P  slots of a prompt
"""

from jaxtyping import Array, Bool, Float, Int, Key

RowKeys = Key[Array, 'B']
Tokens_BE = Int[Array, 'B E']
Tokens_BT = Int[Array, 'B T']
Tokens_BG = Int[Array, 'B G']
Tokens_BP = Int[Array, 'B P']
Tokens_BS = Int[Array, 'B S']
Int_B = Int[Array, 'B']
Bool_B = Bool[Array, 'B']
Float_B = Float[Array, 'B']
Float_BG = Float[Array, 'B G']
Float_BV = Float[Array, 'B V']
Float_BS = Float[Array, 'B S']
Float_BG1 = Float[Array, 'B G1']
Logits_BTV = Float[Array, 'B T V']
LogLaw_BGV = Float[Array, 'B G V']
LogLaw_BG1V = Float[Array, 'B G1 V']

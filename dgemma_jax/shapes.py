"""The one glossary of dimension letters; annotations, einsums and comments use these and nothing else.

B  rows of a batch (slots)          N  query heads                E  experts
C  canvas positions                 K  key/value heads            A  experts chosen per token
T  tokens of one pass               G  query heads per K/V head   I  width of one expert
S  cached positions                 H  head width                 V  vocabulary
L  layers                           D  model width                W  sliding window
P  image patches                    F  dense MLP width            M  vision width
"""

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Key

Array = jax.Array | np.ndarray
Tokens = Int32[Array, "B T"]
Canvas = Int32[Array, "B C"]
Lengths = Int32[Array, " B"]
PerRow = Float32[Array, " B"]
RowMask = Bool[Array, " B"]
Blocks = Int32[Array, "B T"]
RowKeys = Key[Array, " B"]
Hidden = Float[Array, "B T D"]
CanvasHidden = Float[Array, "B C D"]
Logits = Float32[Array, "B C V"]
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B T K H"]
CachedKeys = Float[Array, "B S K H"]
LogSums = Float32[Array, "B T N"]

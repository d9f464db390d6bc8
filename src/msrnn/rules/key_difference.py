"""Key difference: keep tokens whose keys point away from the others. No attention weight is needed.

The score is minus the cosine between a key and the mean direction of all keys in the state, averaged over KV heads
(the idea of KeyDiff, arXiv 2504.15364).
"""

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from msrnn.core.rules import View


def score(view: View) -> Tensor:
    held = view.visible[:, :, None, :, None]
    directions = normalize(view.keys, dim=-1) * held
    mean = directions.sum(3, keepdim=True) / held.sum(3, keepdim=True).clamp(min=1)
    return -cosine_similarity(view.keys, mean, dim=-1).mean(2)

"""Key norm: keep tokens with short keys, which draw more attention (arXiv 2406.11430). No weight is needed."""

from torch import Tensor
from torch.linalg import vector_norm

from msrnn.core.rules import View


def score(view: View) -> Tensor:
    norms: Tensor = vector_norm(view.keys, dim=-1)
    return -norms.mean(2)

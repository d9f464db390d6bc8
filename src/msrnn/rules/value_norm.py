"""Value norm: keep tokens whose values are long, whatever attention they get. `gain=value_norm` multiplies the two."""

from torch import Tensor
from torch.linalg import vector_norm

from msrnn.core.rules import View


def score(view: View) -> Tensor:
    norms: Tensor = vector_norm(view.values, dim=-1)
    return norms.mean(2)

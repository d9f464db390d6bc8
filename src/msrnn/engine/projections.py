"""Fused projections: matmuls with the same input as one, for QKV and for gate/up.

The weights of a group are moved into one tensor, of which the modules keep views: nothing is held twice, and the model
computes what it did. Inside `FusedProjections(model)` the first module of a group computes all, the others take their
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedProjections:
    """Inside this context a model computes the same in fewer matmuls, up to rounding.

    What is not a plain linear layer stays as it is. Made once and entered often, so that compiled graphs stay valid.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, name, module, stand-in
        for parent in list(model.modules()):
            for names in GROUPS:
                if _can_fuse(parent, names):
                    self._fuse(parent, names)

    def _fuse(self, parent: nn.Module, names: Sequence[str]) -> None:
        modules = [getattr(parent, name) for name in names]
        group = _Group(modules)
        for index, (name, module) in enumerate(zip(names, modules, strict=True)):
            self.places.append((parent, name, module, _Part(group, index)))

    def __enter__(self) -> None:
        for parent, name, _, part in self.places:
            setattr(parent, name, part)

    def __exit__(self, *_: object) -> None:
        for parent, name, module, _part in self.places:
            setattr(parent, name, module)


def _can_fuse(parent: nn.Module, names: Sequence[str]) -> bool:
    """Whether these are linear layers and nothing but that, of one width, kind and place, all with a bias or none."""
    modules = [getattr(parent, name, None) for name in names]
    if not all(type(module) is nn.Linear and _bare(module) for module in modules):
        return False
    kinds = {(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in modules if m is not None}
    return len(kinds) == 1


def _bare(module: nn.Linear) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return not hooked and type(module.weight) is nn.Parameter


class _Group:
    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.sizes = [module.out_features for module in modules]
        self.weight = _in_one_tensor([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        self.bias = _in_one_tensor(biases) if biases else None
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, input: Tensor, index: int) -> Tensor:
        if index == 0 or input is not self.input:
            self.input, self.parts = input, torch.split(linear(input, self.weight, self.bias), self.sizes, -1)
        part = self.parts[index]
        if index == len(self.sizes) - 1:  # nobody else will ask: its memory is free again
            self.input, self.parts = None, ()
        return part


class _Part(nn.Module):
    """Stands in for one of a group's modules."""

    def __init__(self, group: _Group, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index

    def forward(self, input: Tensor) -> Tensor:
        return self.group.part(input, self.index)


@torch.no_grad()
def _in_one_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of which these are the parts, in order. Where they are not yet, they are moved there."""
    whole = torch.Size([sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:]])
    end = tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
        if not same or tensor.data_ptr() != end or not tensor.is_contiguous():
            break
        end += tensor.numel() * tensor.element_size()
    else:
        return tensors[0].detach().as_strided(whole, tensors[0].stride())
    whole_tensor = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, torch.split(whole_tensor, [len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return whole_tensor

"""Named pytrees: frozen dataclasses that JAX's transforms see through."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform, no_type_check

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen, slotted, keyword-only dataclass, registered as a pytree; `static` fields are part of its structure.

    Its fields are not checked at run time: JAX rebuilds pytrees around leaves that are no arrays.
    """
    return jax.tree_util.register_dataclass(no_type_check(dataclass(frozen=True, slots=True, kw_only=True)(cls)))

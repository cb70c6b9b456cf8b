"""`lax.while_loop` in plain Python, to step through the loop or run it eagerly."""

from collections.abc import Callable
from typing import Any


def python_while_loop(
  cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any
) -> Any:
  """Does what `jax.lax.while_loop` does, one visible call of `body` at a time."""
  state = init
  while bool(cond(state)):
    state = body(state)
  return state

"""Imports T5X without the two packages that are on no index.

`t5x` must be importable (its sources on PYTHONPATH). Of `airio` it needs some names
to exist, for annotations and `isinstance`, and of `jestimator` an optimizer that is
listed and not used here. Where they are installed, they are left alone.
"""

import functools
import importlib
import importlib.util
import sys
import types
import warnings

import pytest

NEEDED = (
  'needs T5X: its sources (github.com/google-research/t5x) on PYTHONPATH, and pip '
  "install 'specjax[seqio]' cached_property chex fiddle gin-config tensorboard"
)


class _Absent:
  """Nothing is an instance of it."""


def _module(name: str, **attributes) -> types.ModuleType:
  module = types.ModuleType(name)
  module.__path__ = []
  vars(module).update(attributes)
  sys.modules[name] = module
  return module


@functools.cache
def install() -> None:
  """Puts stand-ins for `airio` and `jestimator` where those are not installed."""
  if importlib.util.find_spec('airio') is None:
    names = ('Task', 'Mixture', 'AirIODatasetIterator', 'DatasetProviderBase')
    core = _module('airio.core', **dict.fromkeys(names, _Absent))
    _module('airio', core=core)
  if importlib.util.find_spec('jestimator') is None:
    _module(
      'jestimator',
      amos=_module('jestimator.amos', amos=_unused, ScaleByAmosState=_Absent),
      amos_helper=_module('jestimator.amos_helper', state_partition_rule=_unused),
    )


def _unused(*args, **kwargs):
  raise NotImplementedError('a stand-in that these tests do not use')


def import_t5x(name: str):
  """`t5x.<name>`; skips the test that asks, and says what it needs, without T5X."""
  if importlib.util.find_spec('t5x') is None:
    pytest.skip(NEEDED)
  install()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    try:
      return importlib.import_module(f't5x.{name}')
    except ModuleNotFoundError as error:
      pytest.skip(f'{NEEDED} ({error})')

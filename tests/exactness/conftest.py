"""What is proved here is the program that users run: compiled with every pass."""

import pytest


@pytest.fixture(scope='module', autouse=True)
def _as_users_compile(optimised):
  return

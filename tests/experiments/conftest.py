"""experiments/ is no part of the package: it is found beside it."""

import pathlib
import sys

# Behind everything else, so that an installed specjax stays the one under test.
sys.path.append(str(pathlib.Path(__file__).parents[2]))

"""`python -P start.py NAME ...` runs the worker NAME of this package.

The folder of the benchmarks must not be on a peer's path: transformers would take our kernels.py for the package of
that name. So this package is made known by itself.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        "peers", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None:
        raise ImportError(f"{folder} is no package")
    sys.modules["peers"] = importlib.util.module_from_spec(spec)
    runpy.run_module(f"peers.workers.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)

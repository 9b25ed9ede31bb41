"""The CPU fast path: C++ kernels behind the Runner seam, built on first use."""

from segue_model.runner.native.build import NativeUnavailable
from segue_model.runner.native.native_runner import NativeRunner, pages_for_bytes

__all__ = ["NativeRunner", "NativeUnavailable", "pages_for_bytes"]

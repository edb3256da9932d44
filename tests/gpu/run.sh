#!/usr/bin/env bash
# What only a GPU can show: kernel parity, Transformer Engine layers against the local ones,
# tokens per second and MFU of both paper recipes at full width and reduced depth.
# Skips itself (exit 0) without CUDA.  At most 8 minutes on one H200.
#
#   tests/gpu/run.sh [RESULTS.json]
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "SKIPPED: $PYTHON sees no CUDA device"
  exit 0
fi

# Optional parts: built here when they are missing and can be; their rows say so if not.
need() {  # module, seconds, pip arguments...
  local module=$1 limit=$2
  shift 2
  "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" && return
  echo "building $module (at most $limit s)"
  timeout "$limit" "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps "$@" \
    || echo "without $module: it could not be built here"
}
export MAX_JOBS=${MAX_JOBS:-16}
# The SSD kernels of mamba_ssm are Triton and need no compiler; causal_conv1d is CUDA.
MAMBA_SKIP_CUDA_BUILD=TRUE need mamba_ssm 60 mamba-ssm==2.3.2.post1
need causal_conv1d 90 causal-conv1d==1.7.0
need transformer_engine 90 "transformer-engine[pytorch]==2.20.2"

PYTHONPATH=. PYTHONUNBUFFERED=1 timeout 300 "$PYTHON" -W ignore -m tests.gpu.check "${1:-}"

"""Tests against real inference servers; `run.sh` in this folder starts them all."""

"""Tests on several processes (gloo): sharded parameters, checkpoints, pipelines."""

"""Builds and releases: wheels, a project for Hugging Face's kernel-builder, and the checks of a release."""

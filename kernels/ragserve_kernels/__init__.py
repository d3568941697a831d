"""GPU kernels, one folder per operation, see `kernels/README.md`."""

"""GPU kernels, one folder per operation; none yet, see `kernels/README.md`."""

"""GPU-resident blocks of offloaded requests: which there are, and how they are loaded."""

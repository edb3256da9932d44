"""C++ kernels for CPUs: sources, their compilation on first use, and how they are called."""

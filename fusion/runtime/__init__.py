"""Calls of compiled graphs: `op` has the operators, `kernels` the kernel of each spec, `guards` what runs where a
kernel raises, `derivatives` the gradients."""

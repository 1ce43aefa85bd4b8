"""Other kinds of tensor in a graph: jagged nested tensors, DTensors."""

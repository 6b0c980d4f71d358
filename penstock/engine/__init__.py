"""One step of one rank, from the batch to the loss."""

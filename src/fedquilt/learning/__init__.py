"""What is learned: the form of batches, the loss that clients minimize, the metrics of a model."""

"""Where features lie and how they become batches: tensors, never a decision."""

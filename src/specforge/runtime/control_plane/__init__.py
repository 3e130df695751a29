"""Who may use which sample: metadata only, never a tensor."""

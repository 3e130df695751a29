"""The only home of hydra and omegaconf: compose, check, build, freeze and diff configurations."""

"""What a forward pass changes, kept from the beginning of a step: in modules, around them, and in random generators."""

"""NOTICE: is the loss, a gradient, a weight, a buffer or optimizer state non-finite? Without waiting for the device."""

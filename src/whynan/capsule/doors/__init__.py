"""The doors of torch: attributes replaced by wrappers that ask whether a call is to be recorded, and put back on leaving."""

"""Named stages of a request whose failure fails that request alone."""

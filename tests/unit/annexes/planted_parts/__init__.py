"""Parts of a check that crash, hang, lack something, or find something wrong."""

"""The plug-in that a real SGLang loads: it hands the features of marked requests out of the server, and leaves all others alone."""

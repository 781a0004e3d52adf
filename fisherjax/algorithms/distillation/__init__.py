"""Methods that train a model on the server, on images that the server makes."""

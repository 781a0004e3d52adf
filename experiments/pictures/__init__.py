"""What function_space and fedlpa_pictures compute and draw."""

"""What is computed: the window step."""

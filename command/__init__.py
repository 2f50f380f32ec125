"""What the command needs and the method does not: where models come from, text, checks, screen, records."""

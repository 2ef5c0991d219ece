"""The nouns every stage speaks in: frozen values without behaviour of their own."""

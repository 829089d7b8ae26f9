"""The native looped mixture-of-experts model and its checkpoint folder."""

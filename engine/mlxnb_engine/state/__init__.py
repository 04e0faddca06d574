"""Row state: how K/V and other per-row state are laid out, appended, moved and dropped."""

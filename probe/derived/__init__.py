"""One file is one subject of derived numbers: those computed from recorded measures when they are asked for."""

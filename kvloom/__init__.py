"""kvloom: client SDK and what every process shares (see ARCHITECTURE.md)."""

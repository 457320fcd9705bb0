"""What an agent may do: rulings on acts before they run."""

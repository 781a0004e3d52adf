"""What commands compute for their pictures, and how these are drawn; the README's figure."""

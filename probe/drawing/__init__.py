"""What figures are drawn with: theme, heat maps, series, pages, images."""

"""The runs that were kept: appended, asked, compared."""

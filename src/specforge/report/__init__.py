"""What runs came to: reading run folders, comparing them, and one self-contained HTML page."""

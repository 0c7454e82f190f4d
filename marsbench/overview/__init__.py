"""What is about all studies together: the whole paper reproduced, the index, the page of claims, README's numbers."""

// The service's documents in the form that the page draws.

export const rowsOf = (answer) => answer.fits ?? [];

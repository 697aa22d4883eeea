// Shows /openapi.json with Swagger UI, which reads OpenAPI 3.0: what 3.1 says otherwise is put in the words of 3.0 first.

import { inWordsOf30 } from "./openapi30.js";

const place = document.getElementById("swagger-ui");

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`status ${response.status}`);
  const spec = inWordsOf30(await response.json());
  const prefix = new URL(".", document.baseURI).pathname.replace(/\/$/, "");
  if (prefix) spec.servers = [{ url: prefix }]; // behind a proxy
  // no validator badge and no query parameters that load other descriptions: nothing leaves this host
  window.SwaggerUIBundle({ spec, domNode: place, deepLinking: true, validatorUrl: null, queryConfigEnabled: false });
} catch (error) {
  place.textContent = `The description could not be read (${error.message}). It is at openapi.json.`;
}

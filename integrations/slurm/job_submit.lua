--[[
Checks what cli_filter.lua has left in a job, inside the controller.

slurmctld runs this under its locks, so it asks nobody and reads no file: it only looks at the text that is there.  A job that
the filter has marked gets no more shards than one GPU has, and the prediction id is copied into the admin comment, which the
accounting keeps without AccountingStoreFlags=job_comment.  A site that has a job_submit.lua of its own calls
gpumemnet_check(job_desc) from it.
--]]

local SHARDS_PER_GPU = 0 -- shards of the site's smallest GPU; 0 leaves the number alone

local MARK = "gpumemnet:(%x%x%x%x%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x)"

-- tres_per_node with every shard count cut to one GPU's, and whether one was.  Slurm writes "gres/shard:4" (before 24.05
-- "gres:shard:4", and "gres:shard:a100:4" with a type).
local function capped(resources, most)
  local was_cut = false
  local parts = {}
  for part in string.gmatch(resources, "[^,]+") do
    local head, count = string.match(part, "^(gres[:/]shard[:=])(%d+)$")
    if head == nil then head, count = string.match(part, "^(gres[:/]shard:[^:,=]+[:=])(%d+)$") end
    if head == nil then head, count = string.match(part, "^(shard[:=])(%d+)$") end
    if head and tonumber(count) > most then
      part = head .. string.format("%d", most)
      was_cut = true
    end
    parts[#parts + 1] = part
  end
  return table.concat(parts, ","), was_cut
end

function gpumemnet_check(job_desc)
  local comment = job_desc.comment
  local id = type(comment) == "string" and string.match(comment, MARK)
  if not id then return end
  local admin_comment = job_desc.admin_comment
  if admin_comment == nil or admin_comment == "" then
    job_desc.admin_comment = "gpumemnet:" .. id
  end
  local resources = job_desc.tres_per_node
  if SHARDS_PER_GPU > 0 and type(resources) == "string" then
    local text, was_cut = capped(resources, SHARDS_PER_GPU)
    if was_cut then
      job_desc.tres_per_node = text
      slurm.log_user("%s", "gpumemnet: a job gets at most the " .. SHARDS_PER_GPU .. " shards of one GPU")
    end
  end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  local ok, reason = pcall(gpumemnet_check, job_desc)
  if not ok then
    pcall(slurm.log_info, "%s", "gpumemnet: the job is left as it is: " .. tostring(reason))
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS

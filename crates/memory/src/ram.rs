use dewar_kernel::{
    KernelError, SharedMapping, WritableMapping, data_ranges, huge_page_bytes, is_dax,
    nonzero_ranges, punch_hole,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// One file of guest RAM.
#[derive(Debug)]
pub struct RamRegion {
    /// The name that the hypervisor gives it.
    pub name: String,
    /// Its pages, counted over all regions.
    pub pages: PageRange,
    /// Where the guest's process has it mapped.
    pub addresses: Range<u64>,
    /// How many pages come and go together: 1, or on hugetlbfs those of a huge
    /// page.
    pub step: u64,
    /// Whether its file lies on persistent memory (DAX).
    pub is_dax: bool,
    file: File,
    mapping: SharedMapping,
}

/// All RAM of a guest: its regions laid end to end, counted in pages.
#[derive(Debug, Default)]
pub struct Ram {
    regions: Vec<RamRegion>,
}

impl Ram {
    /// Adds a region behind the others: `bytes` of `file`, which the guest's
    /// process maps at `address`.
    ///
    /// # Errors
    /// Where the file cannot be mapped; where it lies on hugetlbfs and its pages
    /// would not lie at multiples of their size.
    pub fn add(
        &mut self,
        name: String,
        file: File,
        bytes: u64,
        address: u64,
    ) -> Result<(), KernelError> {
        let mapping = SharedMapping::new(&file, bytes as usize)?;
        let first = self.pages();
        let step = huge_page_bytes(&file)?.map_or(1, |huge| huge / PAGE_BYTES as u64);
        if first % step != 0 || (bytes / PAGE_BYTES as u64) % step != 0 {
            let cause = std::io::Error::other("it is not made of whole huge pages");
            return Err(KernelError::new("lay out", format!("RAM '{name}'"), cause));
        }
        let pages = PageRange::new(first, first + bytes / PAGE_BYTES as u64);
        self.regions.push(RamRegion {
            name,
            pages,
            addresses: address..address + bytes,
            step,
            is_dax: is_dax(&file)?,
            file,
            mapping,
        });
        Ok(())
    }

    /// The regions, in order.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// How many pages there are in all.
    pub fn pages(&self) -> u64 {
        self.regions.last().map_or(0, |region| region.pages.end.0)
    }

    /// Copies a page as it is at some moment during the call.
    ///
    /// # Panics
    /// Where there is no such page.
    pub fn copy_page(&self, page: PageNumber, into: &mut [u8]) {
        let region = self.region_of(page);
        region.mapping.copy_page(PageNumber(page.0 - region.pages.start.0), into);
    }

    /// The pages of `range` that may hold something other than zeros.
    ///
    /// # Errors
    /// Where a RAM file cannot be asked.
    pub fn data_ranges(&self, range: PageRange) -> Result<Vec<PageRange>, KernelError> {
        let mut found = Vec::new();
        for region in &self.regions {
            let part = region.pages.intersect(&range);
            if part.is_empty() {
                continue;
            }
            let first = region.pages.start.0;
            let local = PageRange::new(part.start.0 - first, part.end.0 - first);
            let ranges = match region.step {
                1 => data_ranges(&region.file, local)?,
                step => nonzero_ranges(&region.file, local, step)?,
            };
            found.extend(ranges.into_iter().map(|range| range.shifted(first)));
        }
        Ok(found)
    }

    fn region_of(&self, page: PageNumber) -> &RamRegion {
        self.regions
            .iter()
            .find(|region| region.pages.contains(page))
            .unwrap_or_else(|| panic!("page {page} of {}", self.pages()))
    }
}

/// A RAM file that no guest uses yet, to be filled.
#[derive(Debug)]
pub struct NewRam {
    file: File,
    /// On hugetlbfs, where files cannot be written.
    mapping: Option<WritableMapping>,
}

impl NewRam {
    /// Takes charge of the first `bytes` of `file`.
    ///
    /// # Errors
    /// Where it cannot be mapped.
    pub fn new(file: File, bytes: u64) -> Result<Self, KernelError> {
        let mapping = match huge_page_bytes(&file)? {
            Some(_) => Some(WritableMapping::new(&file, bytes as usize)?),
            None => None,
        };
        Ok(Self { file, mapping })
    }

    /// Makes a hole: what lies there reads as zeros, and a page of it is missing for who looks. Of a page
    /// that the kernel cannot free just now only the content goes: look whether all are missing.
    ///
    /// # Errors
    /// Where the file cannot be changed.
    pub fn clear(&self, offset: u64, bytes: u64) -> Result<(), KernelError> {
        punch_hole(&self.file, offset, bytes)
    }

    /// Reads at a distance from the start.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), KernelError> {
        let read = self.file.read_exact_at(bytes, offset);
        read.map_err(|cause| KernelError::new("read", "a guest's RAM file", cause))
    }

    /// Writes at a distance from the start.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), KernelError> {
        match &self.mapping {
            Some(mapping) => mapping.write_at(bytes, offset),
            None => self
                .file
                .write_all_at(bytes, offset)
                .map_err(|cause| KernelError::new("write", "a guest's RAM file", cause))?,
        }
        Ok(())
    }
}

/// Where the pages of a guest lie in its process.
#[derive(Debug, Clone)]
pub(crate) struct AddressMap {
    spans: Vec<Span>,
}

/// Where a region lies.
#[derive(Debug, Clone)]
struct Span {
    pages: PageRange,
    /// The address of the first.
    address: u64,
    /// Pages that come and go together.
    step: u64,
}

impl AddressMap {
    pub(crate) fn of(ram: &Ram) -> Self {
        let span = |region: &RamRegion| Span {
            pages: region.pages,
            address: region.addresses.start,
            step: region.step,
        };
        Self { spans: ram.regions.iter().map(span).collect() }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.pages.end.0)
    }

    /// Whole regions, as addresses.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.spans
            .iter()
            .map(|span| span.address..span.address + span.pages.count() * PAGE_BYTES as u64)
    }

    /// The parts of `range` by region, as addresses.
    pub(crate) fn addresses(&self, range: PageRange) -> impl Iterator<Item = Range<u64>> + '_ {
        self.spans.iter().filter_map(move |Span { pages, address, .. }| {
            let part = pages.intersect(&range);
            let at = |page: PageNumber| address + (page.0 - pages.start.0) * PAGE_BYTES as u64;
            (!part.is_empty()).then(|| at(part.start)..at(part.end))
        })
    }

    /// The page at `address`.
    pub(crate) fn page_at(&self, address: u64) -> Option<PageNumber> {
        self.spans.iter().find_map(|Span { pages, address: start, .. }| {
            let offset = address.checked_sub(*start)? / PAGE_BYTES as u64;
            (offset < pages.count()).then(|| PageNumber(pages.start.0 + offset))
        })
    }

    /// The pages that come and go together with `page`, itself among them.
    pub(crate) fn together(&self, page: PageNumber) -> PageRange {
        let span = self.spans.iter().find(|span| span.pages.contains(page));
        let step = span.map_or(1, |span| span.step);
        // Regions begin at multiples of their step.
        let start = page.0 - page.0 % step;
        PageRange::new(start, start + step)
    }

    /// The pages of an address range that lies within one region.
    pub(crate) fn pages_at(&self, addresses: &Range<u64>) -> Option<PageRange> {
        let start = self.page_at(addresses.start)?;
        let count = (addresses.end - addresses.start) / PAGE_BYTES as u64;
        Some(PageRange::new(start.0, start.0 + count))
    }
}
